"""ShapeWorld, a tiny world for text-to-video, and ShapeEval, its judge: GenEval in miniature."""
