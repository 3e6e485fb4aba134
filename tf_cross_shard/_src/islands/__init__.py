"""OuterOptimizer: groups that are averaged every few steps (DiLoCo)."""
