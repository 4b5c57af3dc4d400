"""Other projects' interfaces over torchport, for programs that were written for them."""
