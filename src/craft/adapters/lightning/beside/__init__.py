"""CRAFT beside one of Lightning's strategies."""
