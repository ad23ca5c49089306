"""Kernels of vendor libraries; `specs` lists them, and a library is imported when its kernel is first selected."""
