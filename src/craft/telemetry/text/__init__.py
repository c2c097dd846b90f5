"""Text for people: logs, standard output, worker logs, text from outside made safe."""
