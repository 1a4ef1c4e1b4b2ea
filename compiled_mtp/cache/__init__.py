"""Memory that outlives a step: pages of keys and values, recurrent states, and who owns which."""
