"""Object stores as storage, through obstore (extra `cloud`): imported only when a URL asks for one."""
