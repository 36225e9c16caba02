"""Reports, tables and figures in every format: the table model and its writers, exact decimals. Nothing here knows runs."""
