"""Which ranks there are and how they agree: topology, the group protocol, torch.distributed, and a world of one."""
