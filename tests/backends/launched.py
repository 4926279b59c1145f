"""The kernels that each module of the backend launches."""

from foci.backends.triton import auxiliary, capture_gradients, kernel, sparsity

LAUNCHED = {
    kernel: (
        "attention_forward",
        "prepare_rows",
        "attention_query_gradient",
        "attention_key_gradient",
        "attention_decode",
        "combine_splits",
    ),
    sparsity: ("classify_tiles", "list_tiles", "assign_tasks", "place_sequences"),
    capture_gradients: ("attention_bias_gradient", "capture_gradient"),
    auxiliary: ("weigh_columns", "weigh_rows"),
}
