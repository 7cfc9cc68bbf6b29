"""Trainers of others, with rollouts by Paceline: a folder for each."""
