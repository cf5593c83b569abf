"""Records of runs and what is drawn from them. Works without torch."""
