"""What a script calls: the job, its steps, attempts and collectives."""
