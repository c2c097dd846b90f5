"""The loop that decides, what feeds it, and what makes its state durable."""
