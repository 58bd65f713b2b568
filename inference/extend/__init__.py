"""What a deployment may add to the engine: observers, which see steps and change nothing."""
