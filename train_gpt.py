from birdie.cli.challenge import main

main()
