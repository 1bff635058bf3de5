"""The option --device of commands that compute."""

import argparse

import torch


def parse_device(text: str) -> torch.device:
    """cpu or cuda:N, for argparse."""
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"needed cpu or cuda:N, found {text}") from error
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise argparse.ArgumentTypeError(f"needed {text}, found {num_gpus} GPUs")
    return device
