"""An invented row of a published training run, in the columns of the files of measurements."""

INVENTED = "invented for this test, not a measurement"
RUN = {
    "source": INVENTED, "source_date": "2025-06-01", "model": "Llama3-8B", "arch": "dense", "layers": "32",
    "hidden": "4096", "heads": "32", "kv_heads": "8", "ffn": "14336", "vocab": "128256", "seq_len": "8192",
    "gpu": "H100 SXM 80GB", "gpu_mem_gb": "80", "n_gpus": "8", "fsdp": "8", "zero_stage": "3", "mbs": "1", "gbs": "8",
    "precision": "bf16", "act_ckpt": "selective (op)", "compile": "Y", "framework": "torchtitan", "step_time_s": "1.5",
    "trust": "A",
}  # fmt: skip
