"""Are the optional packages there? If not, the error says how to get them."""

import importlib.util

from partita.errors import MissingExtraError


def need_torch(purpose: str = "capturing a PyTorch model") -> None:
    """Refuse with the pip command where PyTorch is not installed."""
    need("torch", "torch", purpose)


def need_onnx(purpose: str = "reading an ONNX file") -> None:
    """Refuse with the pip command where onnx is not installed."""
    need("onnx", "onnx", purpose)


def need(package: str, extra: str, purpose: str) -> None:
    """Refuse with the pip command where an optional package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(package, extra, purpose)
