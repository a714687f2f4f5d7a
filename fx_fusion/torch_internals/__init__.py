"""Every use of a private name of torch, behind a function that says what happens when it is gone."""
