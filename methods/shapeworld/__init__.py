"""ShapeWorld, a tiny world for text-to-video, and ShapeEval, its judge: GenEval in miniature.

A scene is one moving object, two objects in a relation, or a count of equal objects (``scene.py``: words to scenes and
back). ``render.py`` draws a scene as 9 frames of 32x32 pixels; ``heldout.py`` fixes which combinations training never
sees and the 128 prompt/seed pairs of the evaluation; ``judge.py`` reads colour, shape, motion, two objects, position
and count off decoded uint8 frames by analysis by synthesis, and calls invalid whatever a reward would be gamed with.
All of it is numpy, deterministic by seed, and learns nothing.

    from methods.shapeworld.judge import judge
    judge(frames_FHWC, "a red circle left of a blue square").all_correct
"""
