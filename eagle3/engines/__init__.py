"""Who runs the target model."""
