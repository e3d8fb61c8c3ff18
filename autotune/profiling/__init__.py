"""Everything that runs torch: model, executor, meters, worker and launcher."""
