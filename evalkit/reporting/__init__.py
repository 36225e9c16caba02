"""Reports, tables and figures in every format, without knowledge of runs."""
