"""Many engines behind one service: a stream goes on when the engine that decodes it dies. Imports no Ray."""
