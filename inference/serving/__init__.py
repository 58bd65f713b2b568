"""The HTTP server over the engine: an OpenAI-compatible ``/v1/videos`` with jobs, models, health and metrics.

``app.create_app`` puts it together. One thread (``worker``) drives the engine; the routes only touch jobs. Knows the
engine and the wire; knows nothing of how a step is computed, and no training method.
"""
