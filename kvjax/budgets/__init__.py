"""Numbers of slots that a method may keep: fixed, by share, by prompt length and by layer."""
