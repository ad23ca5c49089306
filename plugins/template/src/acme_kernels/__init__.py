"""Kernels for tokenspeed-kernel. `plugin.PLUGIN` says what there is."""
