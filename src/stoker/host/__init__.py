"""This host has facts, and its processes have ties: this package imports nothing else of stoker."""
