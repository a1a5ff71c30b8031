"""The parent's side: workers are started, asked and watched."""
