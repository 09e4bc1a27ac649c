"""Checks of this host, of an AWS account and of a cluster for what a run needs."""
