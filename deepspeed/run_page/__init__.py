"""The run page: what the files of events of a run tell, served on this machine or written as one HTML file."""
