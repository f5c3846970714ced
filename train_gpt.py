from birdie.golf.checkout import main

main()
