"""The option --device of commands that compute."""

import argparse

import torch


def parse_device(text: str) -> torch.device:
    """cpu or cuda:N, for argparse."""
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"needed cpu or cuda:N, found {text}") from error
