"""The kernels that each module of the backend launches."""

from foci.backends.gpu import aux_outputs, captured_grad, mend_launches, portable_passes, tile_tables

LAUNCHED = {
    portable_passes: (
        "attention_forward",
        "prepare_rows",
        "attention_query_gradient",
        "attention_key_gradient",
        "attention_decode",
        "combine_splits",
        "mend_splits",
    ),
    mend_launches: ("mend_rows", "mend_gradients"),
    tile_tables: ("classify_tiles", "list_tiles", "assign_tasks", "place_sequences"),
    captured_grad: ("attention_bias_gradient", "capture_gradient"),
    aux_outputs: ("weigh_columns", "weigh_rows"),
}
