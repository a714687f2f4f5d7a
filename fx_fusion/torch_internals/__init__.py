"""Every use of a private name of torch. Each stands behind a function whose docstring says, after "Gone:", what happens when
the name is no longer there. ``tests/test_torch_contract.py`` checks the contracts on each supported version of torch.

Imports nothing of fx_fusion. No other room names anything of torch that begins with an underscore."""
