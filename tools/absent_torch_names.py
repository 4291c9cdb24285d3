"""A pytest plugin: bare stand-ins for the names that torch removed, so that stock lightning-thunder can be imported."""

import torch

for name in ("align_as", "align_to", "has_names", "refine_names", "rename"):
    if not hasattr(torch.Tensor, name):
        stand_in = lambda *args, **kwargs: NotImplemented  # noqa: E731
        stand_in.__name__ = name  # thunder looks it up by its name
        setattr(torch.Tensor, name, stand_in)
