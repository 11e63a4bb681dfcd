# These run in environments of their own, where the other frameworks are.
collect_ignore_glob = ["peers/*_runner.py", "peers/flower_client.py", "peers/fedjax_models.py"]
