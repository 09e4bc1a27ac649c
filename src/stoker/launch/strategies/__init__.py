"""Strategies start the training command on the dnn hosts: see the modules."""
