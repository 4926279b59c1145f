"""What the commands do, one module or folder each. `foci_cli.app` has their options. Needs the extra `cli`."""
