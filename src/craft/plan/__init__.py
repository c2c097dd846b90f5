"""Predict what each technique costs a job and saves it: figures in, tables and a chart out."""
