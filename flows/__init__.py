"""In what order: one flow per stage, and the pipeline that chains them."""
