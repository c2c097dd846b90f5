"""CRAFT beside one of Lightning's own strategies."""
