"""Files and batches: uploads, jobs, their lines and their results."""
