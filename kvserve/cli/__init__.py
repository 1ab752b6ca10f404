def main() -> None:
    raise SystemExit
