"""How modules are born sharded: `zero.Init`."""
