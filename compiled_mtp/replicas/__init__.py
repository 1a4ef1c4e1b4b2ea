"""Many engines behind one service: a stream continues when its engine dies. Imports no Ray."""
