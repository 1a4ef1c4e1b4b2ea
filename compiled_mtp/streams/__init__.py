"""The outputs of requests as streams of event loops, and how many may be open."""
