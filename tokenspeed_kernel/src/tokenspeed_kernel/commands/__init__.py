"""Commands of `tokenspeed-kernel`: one module each, found by its folder."""
