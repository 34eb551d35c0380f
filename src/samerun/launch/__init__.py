"""Starting ranks with PyTorch's own launcher, and giving its exit code the meaning that it loses."""
