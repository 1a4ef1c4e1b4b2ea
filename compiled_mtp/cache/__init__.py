"""Memory that outlives a step: pages of keys and values, recurrent states, and their owners."""
