"""Documents of finished runs: views of one or two runs → selected documents → reports."""
