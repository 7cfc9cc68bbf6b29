"""Divided rollout over many engines: a controller that decides, Ray that carries out. Only this folder imports Ray."""
