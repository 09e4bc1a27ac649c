"""Tokens of runs, as platforms make them."""

import secrets


def new_token() -> str:
    return secrets.token_hex(32)
