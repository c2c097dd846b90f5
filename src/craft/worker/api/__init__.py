"""The interface that training scripts call: the job, its steps, attempts and collectives."""
